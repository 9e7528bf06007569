"""`headwater plan`: what memory, disk and pool would bring for a trace, in money.

`shape` says how large a token's KV is, `paces` what computing and loading take, `search` replays the trace on one
choice of sizes after another, `answer` turns that into money and a sentence, `page` draws it.
"""
