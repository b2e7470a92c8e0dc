"""Adapters (LoRA, LoHa, LoKr, IA3...): read, merged into a base, checked, converted, extracted.

In: an adapter of peft, kohya, diffusers or ComfyUI, and a base of any format. Out: the base with
changed weights, as byte ranges and operations. Start at `merge`: `MergePlan` does it all. Uses
core, compute, quantized, rules, publish, edits, formats and api.
"""
