"""The executor of one rank: a queue for each store, jobs and their threads, staging pages, copies in place."""
