"""What runs dispatched plans: the extension, private clients, captures, and the program that the executor runs."""
