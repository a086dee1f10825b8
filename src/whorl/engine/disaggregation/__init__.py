"""Transfer of KV pages between prefill and decode processes."""
