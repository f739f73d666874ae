"""A kind of model outside gputrain: a folder as an installed package has it, whose entry point names its ModelKind."""
