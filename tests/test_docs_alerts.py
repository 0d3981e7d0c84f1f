"""The page about alerts has what alerts.yml has."""

import re

import yaml

from tests.pages import ROOT

PAGE = (ROOT / "docs" / "alerts.md").read_text()
RULES = (ROOT / "docs" / "ops" / "alerts.yml").read_text()

ROW = re.compile(r"^\| `(Queue\w+)` \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_each_alert_has_a_row_that_says_what_to_do() -> None:
    """All of the rules, in their order, and no others."""
    (group,) = yaml.safe_load(RULES)["groups"]
    assert [row[0] for row in ROW.findall(PAGE)] == [rule["alert"] for rule in group["rules"]]


def test_a_row_leads_to_findings_and_sections_that_are_there() -> None:
    """By the anchors that the pages have."""
    findings = set(re.findall(r'<a id="(\w+)">', (ROOT / "docs" / "findings.md").read_text()))
    assert set(re.findall(r"findings\.md#(\w+)", PAGE)) <= findings
    headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"troubleshooting\.md#([\w-]+)", PAGE)) <= slugs
