"""Seeing a run: its event log, and what looks at it (terminal, HTML report, text table, TensorBoard)."""
