"""Real failures of other systems over upgrades: B95, old and new versions side by side. B98 has its own file."""

import pytest

from tests.soak import rolling_deploy

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.full
def test_b95_two_versions_run_side_by_side_and_back_and_no_message_is_lost():
    """
    Four phases, shortened: migrated under the old version, both, the new one alone, the old one on the new tables.

    Each handles what the other published and left; no column was dropped, or demands a value that the old one does
    not give.
    """
    if reason := rolling_deploy.missing_history():
        pytest.skip(reason)
    figures = rolling_deploy.run(1.5)
    assert figures["lost"] == 0
    assert all(count > 0 for count in figures["handled"].values())
