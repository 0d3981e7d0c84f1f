"""The page about alerts has what alerts.yml has."""

import re

import yaml

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "alerts.md").read_text()
RULES = (ROOT / "docs" / "ops" / "alerts.yml").read_text()

ROW = re.compile(r"^\| `(Queue\w+)` \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_each_alert_has_a_row_that_says_what_to_do() -> None:
    """All of the rules, in their order, and no others."""
    (group,) = yaml.safe_load(RULES)["groups"]
    assert [row[0] for row in ROW.findall(PAGE)] == [rule["alert"] for rule in group["rules"]]


def test_a_row_leads_to_findings_and_remedies_that_are_there() -> None:
    """By the anchors that headings have."""
    for page in ("findings", "troubleshooting"):
        headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        named = set(re.findall(rf"{page}\.md#([\w-]+)", PAGE))
        assert named and named <= anchors
