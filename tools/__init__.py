"""What the makers of this project use: nothing here is installed."""
