"""Many sequences over one model: slots, prefix reuse, saving, scheduling, one pass for all rows.

Whoever has requests (an HTTP server, an editor's language server) hands them to a `SessionPool`
and reads their outboxes. Knows no protocol and no screen.
"""
