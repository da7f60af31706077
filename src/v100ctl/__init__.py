"""v100ctl: provision, serve on and keep a fleet of hosts with NVIDIA V100 GPUs."""

__version__ = "0.1.0"
