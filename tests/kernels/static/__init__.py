"""What the Triton kernels compile to, judged for GPUs that are not here."""
