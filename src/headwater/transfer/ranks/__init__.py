"""One executor over several ranks: who does which part of a job, and what all of them say of it."""
