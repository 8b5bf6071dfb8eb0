"""What a processor keeps in the store: its tables, their schemas and their states."""
