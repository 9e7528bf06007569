"""The HTTP face: OpenAI's completions and chat over the reference engine. Needs `headwater[serve]`."""
