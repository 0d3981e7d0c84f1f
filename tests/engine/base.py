"""PostgreSQL for aliases that a test makes: the guard against other aliases than a test's own lets them be."""

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    def ensure_connection(self) -> None:
        # The guard replaces the method of the base class, for aliases that were named before the test began.
        if self.connection is None:
            with self.wrap_database_errors:
                self.connect()
