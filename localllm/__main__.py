"""`python -m localllm`: the same as the `localllm` command, even in a checkout that is not installed."""

from localllm.cli import main

if __name__ == "__main__":
    main()
