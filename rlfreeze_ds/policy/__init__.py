"""HOW FAR: who moves the criterion's thresholds. Only :mod:`server` imports ray; what runs in a job needs neither ray nor
torch."""
