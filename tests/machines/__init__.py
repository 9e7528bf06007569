"""State machines of our own tests, the worlds they drive, and processes that play a part in them."""
