"""Reads whether an answer goes on with the last message of a conversation."""

from kvq_apps.serve.fields import Fields


def continued_message(fields: Fields) -> Fields | None:
    """Returns the last message where the answer goes on with it, None where a turn begins.

    An assistant's last message is continued unless a field says otherwise. Raises `RequestError`
    for fields that exclude each other, and for a message that cannot be continued.
    """
    rows = fields.objects("messages")
    last = rows[-1] if rows and rows[-1].get("role") == "assistant" else None
    possible = last is not None and not last.get("tool_calls")
    begins = fields.flag("add_generation_prompt", not possible)
    continues = fields.flag("continue_final_message", possible and not begins)
    if not continues:
        return None
    if fields.get("add_generation_prompt"):
        fields.refuse_with(
            "continue_final_message",
            "continue_final_message goes on with the last message and add_generation_prompt "
            "begins a new one; send one of them",
        )
    if not possible:
        fields.refuse_with(
            "continue_final_message",
            "continue_final_message is not possible: the last message has to be an assistant's "
            "without tool_calls; end with one, or leave the field out",
        )
    return last
