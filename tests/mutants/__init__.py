"""
Break each promise on purpose, and see a test turn red.

    python -m tests.mutants              # all of them
    python -m tests.mutants fencing      # those whose promise or change holds the word
    python -m tests.mutants --touched    # those that a change touches, and an eighth of the rest

A mutant is one small change to the package and the tests that must notice it. A promise whose mutant
turns nothing red is not tested.

* `mutant.py`: what a mutant is; `promises.py`: what they break.
* `lists/`: all of them, a module for each folder of the package, and whether each still applies.
* `choice.py`: which of them a run tries.
* `place.py`: a copy of the tree and a PostgreSQL server, where mutants are tried one after the other;
  `servers.py`: which tests need another one.
* `verdict.py`: what a run of pytest says about a mutant.
"""
