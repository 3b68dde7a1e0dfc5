"""End-to-end tests of the deployed application: real Ray, real HTTP, the demo model and its adapters."""
