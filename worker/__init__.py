"""Jobs in, results out: Celery, Redis and SQL around one engine."""
