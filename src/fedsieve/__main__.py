"""`python -m fedsieve` is the `fedsieve` command."""

from fedsieve.cli import main

main()
