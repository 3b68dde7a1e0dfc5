#!/usr/bin/env bash
# tests/gpu/run.sh [--quick]   correctness, replays, compute-sanitizer and times on this machine's GPU, within 4 minutes
# tests/gpu/run.sh --engine    answers and decode speed of the engine on it, within 5 minutes
# tests/gpu/run.sh --check     the same program under Triton's interpreter, on the CPU, with tiny shapes
#
# It uses $PYTHON, or .venv, or python3, whichever has what is needed first; else it makes .venv, which takes a network.
# VLLM_SRC and SGL_SRC name folders of vLLM's and SGLang's packages, where those are to be compared with.
set -uo pipefail
cd "$(dirname "$0")/../.."

needed="import torch, triton, numpy, pytest"
if [[ " $* " == *" --engine "* || " $* " == *" --check "* ]]; then
    needed="$needed, transformers, safetensors, msgspec, pydantic, llguidance, blake3, psutil, regex"
fi
if [[ " $* " == *" --check "* ]]; then
    export TRITON_INTERPRET=1
else
    unset TRITON_INTERPRET
    if ! command -v nvidia-smi >/dev/null && ! command -v rocm-smi >/dev/null; then
        echo "tests/gpu: neither nvidia-smi nor rocm-smi is here, so no GPU: --check runs without one" >&2
        exit 2
    fi
    needed="$needed; assert torch.cuda.is_available()"
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

find_python() {
    for python in ${PYTHON:+"$PYTHON"} .venv/bin/python python3; do
        if "$python" -c "$needed" >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
    return 1
}

if ! python="$(find_python)"; then
    for missing in make python3; do
        if ! command -v "$missing" >/dev/null; then
            echo "tests/gpu: no Python here has torch for this machine, triton, numpy and pytest, and $missing is" \
                "missing to make one: install $missing, or set PYTHON" >&2
            exit 2
        fi
    done
    echo "tests/gpu: making .venv (no Python here has torch for this machine, triton, numpy and pytest)" >&2
    if ! make setup >&2 || ! python="$(find_python)"; then
        "${PYTHON:-python3}" -c "$needed" >&2
        echo "tests/gpu: the environment could not be made: set PYTHON to a Python with these packages" >&2
        exit 2
    fi
fi
exec "$python" -m tests.gpu "$@"
