"""How large a model trains under limits of memory."""
