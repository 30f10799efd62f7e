"""Live hand-over of KV pages between SGLang engines: an SGLang plugin. Order and states: docs/kv-handover.md."""
