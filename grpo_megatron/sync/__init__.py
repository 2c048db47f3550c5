"""The weight sync: from any training layout to any rollout layout, with the fewest bytes. Names and shapes only, no models.

weight_sync.py has WeightSync and its codecs; plan.py decides who sends what, exchange.py moves it, patches.py moves changes,
digest.py and attest.py prove what the engine has; digest.py also joins tensors of one shape.
"""
