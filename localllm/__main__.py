"""`python -m localllm`: the same as the `localllm` command, also in a checkout that is not installed."""

from localllm.cli import main

if __name__ == "__main__":
    main()
