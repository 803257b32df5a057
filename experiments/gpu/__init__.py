"""One GPU: speed, memory, predictions, streams"""
