"""Mutants of commands/."""

from tests.mutants.mutant import Mutant
from tests.mutants.promises import INSPECTED, WRITTEN

MUTANTS = (
    Mutant(
        WRITTEN,
        "an option has another default than its help says",
        "management/commands/consume_queues.py",
        "            default=30.0,\n",
        "            default=60.0,\n",
        ("tests/docs/test_reference.py::test_the_help_of_an_option_tells_its_default[consume_queues]",),
    ),
    Mutant(
        WRITTEN,
        "JSON without a key of the page",
        "management/commands/diagnose_queues.py",
        '        "remedy": remedy_of(message),\n',
        "",
        ("tests/docs/test_reference.py::test_json_has_the_keys_of_the_page",),
    ),
    Mutant(
        INSPECTED,
        "what is not counted is not told",
        "management/commands/inspect_queues.py",
        "numbers.is_more and exact is None",
        "False",
        ("tests/commands/test_inspect_queues.py::test_many_messages_are_counted_only_when_that_is_asked_for",),
    ),
    Mutant(
        INSPECTED,
        "nobody gets exact numbers",
        "management/commands/inspect_queues.py",
        "counting.stats(names, using)} if exact else {}",
        "counting.stats(names, using)} if False else {}",
        ("tests/commands/test_inspect_queues.py::test_many_messages_are_counted_only_when_that_is_asked_for",),
    ),
)
