"""Examines a model before it is trained, and refuses what cannot be shown to be right.

Where it is refused that

    a unit mixes samples                 rules: RuleFinder.of_output; in backward, or in hooks,
                                         examine: _check_backward, _gradients
    code outside of units mixes them     attempt: _check_rows; in backward _check_gradients,
                                         with gradients: GradientCut
    a unit's sum or mean leaves out      examine: _check_joins
    samples, or counts values
    a loss is no sum, once it is used    microbatch.loss: Output.check_adds_up, check_factors;
                                         attempt
    the model draws random numbers       watch: Watcher.run; attempt: _check_draws
    a tensor leaves or enters a unit     watch
    in other ways
    a call changes arguments, or counts  probed_call: CallRunner.run, look
    a forward replaces parameters,       comparing: check_params; module_state: Writes.check;
    writes buffers, or keeps values      attempt: _check_kept
    arguments cannot be cut              known_calls: _check_can_be_probed, before any run
    a module shows without being run     sharding.unit (units), sharding.build (parameters)
"""
