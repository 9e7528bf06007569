"""The router: one OpenAI address in front of prefill, decode and mixed nodes. Who is asked, and whether again."""
