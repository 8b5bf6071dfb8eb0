"""What runs a processor and watches it: the controller, its children, checks before the start, status and screen."""
