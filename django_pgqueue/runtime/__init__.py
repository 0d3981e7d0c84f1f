"""What every loop needs: its own connections, retries while the database is unavailable, and the listener."""
