"""What every part may use and that knows no part: logs, threads, sockets, units, retries."""
