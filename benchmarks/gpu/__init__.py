"""What of the library a machine with GPUs can check and measure: ``make gpu-check``, and one report to send back.

``python -m benchmarks.gpu --device cpu`` runs the same programme on the CPU, with small sizes.
"""
