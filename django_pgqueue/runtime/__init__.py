"""What every loop stands on: connections of its own, patience when the database is away, the listener."""
