"""Live hand-over of KV pages between SGLang engines: an SGLang plugin. docs/kv-handover.md tells the order and the states."""
