"""Vocabulary: pure values that every room understands. Imports nothing of ours, holds no clock, thread, file or tensor."""
