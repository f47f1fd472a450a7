"""WHAT may freeze, and the masks that freeze it: torch (but for ``shape`` and ``masks``), no deepspeed."""
