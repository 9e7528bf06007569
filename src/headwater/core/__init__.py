"""Vocabulary: pure values that every room understands. No clock, thread, file or tensor here."""
