"""
The command: see the package's docstring.

Exit status 1 when a mutant lives, when one does not apply any more, or when the tests fail without any.
"""

import argparse
import contextlib
import datetime
import os
import queue
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import tests.mutants
from tests.mutants.choice import Choice, named, touched
from tests.mutants.lists import MODULES, ROOT, all_mutants, faults
from tests.mutants.mutant import Mutant
from tests.mutants.place import Place, open_place
from tests.mutants.verdict import NOTICED, PASSED, Outcome, end_all

T = TypeVar("T")


def main() -> int:
    """Run the mutants that the arguments name."""
    options = parse()
    mutants = all_mutants()
    if found := faults(mutants):
        print(*found, f"{len(found)} faults in the lists of mutants", sep="\n")
        return 1
    choice = choose(mutants, options.words, touched_only=options.touched)
    tell(choice, mutants)
    if options.list or not choice.mutants:
        print(*choice.mutants, sep="\n")
        return 0
    # A terminated run ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with crew(min(options.jobs, len(choice.mutants))) as share:
        if not options.unbroken and (output := unbroken(share, choice.mutants)) is not None:
            print(output[-4000:], "\nthe tests fail without any mutant")
            return 1
        return try_all(share, choice.mutants)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=tests.mutants.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help="only mutants whose promise or change holds one of these words")
    parser.add_argument(
        "--touched",
        action="store_true",
        help="only mutants whose file or test is changed since PGQUEUE_BASE (default: the newest tag landed-*, or "
        "else the parent commit), and an eighth of the rest by the day of the year",
    )
    # Tests mostly wait.
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="how many at once")
    parser.add_argument("--list", action="store_true", help="print the mutants that would be tried, and try none")
    parser.add_argument(
        "--unbroken", action="store_true", help="the tests have just passed without any mutant: don't run them first"
    )
    options = parser.parse_args()
    if not named(all_mutants(), options.words):
        parser.error("no mutant has such a word")
    return options


def choose(mutants: Sequence[Mutant], words: Sequence[str], *, touched_only: bool) -> Choice:
    """Return the mutants of the words, or those of them that the change touches and the day's share."""
    of_words = named(mutants, words)
    if touched_only:
        return touched(of_words, ROOT, datetime.date.today())
    return Choice(of_words, f"those with {' or '.join(words)}" if words else "all")


def tell(choice: Choice, mutants: Sequence[Mutant]) -> None:
    """Print how many are chosen, and of which lists others are left out."""
    print(f"{len(choice.mutants)} of {len(mutants)} mutants: {choice.reason}")
    left: Counter[str] = Counter()
    for module in MODULES:
        left[module.__name__.rpartition(".")[2]] += sum(mutant not in choice.mutants for mutant in module.MUTANTS)
    if left.total():
        print(f"left out: {left.total()}", *(f"{name} {number}" for name, number in left.items() if number), sep=", ")
    sys.stdout.flush()


# A function that does something in whatever place is free, for each thing, and gives each result when it is there.
Share = Callable[[Callable[[Place, T], Outcome], Sequence[T]], Iterator[tuple[T, Outcome]]]


@contextlib.contextmanager
def crew(size: int) -> Iterator[Share]:  # type: ignore[type-arg]
    """Open this many places, and yield a function that shares work out among them."""
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(size) as pool:

        def share(work: Callable[[Place, T], Outcome], things: Sequence[T]) -> Iterator[tuple[T, Outcome]]:
            def somewhere(thing: T) -> tuple[T, Outcome]:
                place = free.get()
                try:
                    return thing, work(place, thing)
                finally:
                    free.put(place)

            for done in as_completed([pool.submit(somewhere, thing) for thing in things]):
                yield done.result()

        try:
            for place in pool.map(lambda _: stack.enter_context(open_place()), range(size)):
                free.put(place)
            yield share
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()


def unbroken(share: Share, mutants: Sequence[Mutant]) -> str | None:  # type: ignore[type-arg]
    """Run the tests of the mutants without any. Returns what they say if they fail."""
    of_files: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            of_files.setdefault(test.partition("::")[0], {})[test] = None
    for _, outcome in share(Place.try_unbroken, [tuple(of_file) for of_file in of_files.values()]):
        if outcome.status != PASSED:
            return outcome.output
    return None


def try_all(share: Share, mutants: Sequence[Mutant]) -> int:  # type: ignore[type-arg]
    """Print what becomes of each mutant. Returns the exit status."""
    lives = 0
    for mutant, outcome in share(Place.try_mutant, mutants):
        print(f"{outcome.verdict:8}  {mutant}", flush=True)
        if outcome.verdict != NOTICED:
            lives += 1
            print(outcome.output[-2000:])
    print(f"{len(mutants) - lives} mutants noticed, {lives} not")
    return 1 if lives else 0


if __name__ == "__main__":
    sys.exit(main())
