"""Jobs that run: the activity logs and word count, a generator for their input, and the demo."""
