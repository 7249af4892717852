"""Many sequences over one model: slots, prefix reuse, saving, scheduling, shared passes.

A server, such as one for HTTP or an editor's language server, gives requests to a `SessionPool` and
reads their outboxes. No protocol is known here.
"""
