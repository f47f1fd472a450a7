"""HOW FAR: who moves the criterion's thresholds. Only :mod:`learner`, :mod:`job_runner` and :mod:`local_ray` import ray;
what runs in a job needs neither ray nor torch."""
