"""Adapters (LoRA, LoHa, LoKr, IA3...): read, merged into a base, checked, converted, extracted.

In: an adapter of peft, kohya, diffusers or ComfyUI, and a base of any format. Out: the base with
its weights changed, as byte ranges and operations. Uses core, compute, quantized, rules, publish,
edits, formats and api.
"""
