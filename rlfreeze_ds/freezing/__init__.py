"""WHAT may freeze, and the masks that freeze it: torch, no deepspeed."""
