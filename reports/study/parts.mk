# What `make study PART=name` trains: settings of params.yaml, part by part. README.md says what each asks and found.

comma := ,
list = [$(subst $() $(),$(comma),$(strip $(1)))]
# The same geometry on weights that nothing rounds to it: a gain in the format beyond that is the format's own.
twins = $(1) $(addprefix virtual.,$(1))

# 200 steps unless a part says otherwise, rates fixed on seeds 10 to 12, judged on seeds 20 and above.
NOW := model=pico corpus=licences tokenizer.vocab_size=1024 train.steps=200 grid.recipe=uniform \
	$(foreach arm,adamw adamw_sr stiff_matched permuted_matched,optimizers.$(arm).plain_lr=2.4e-2)
TUNED := $(NOW) grid.seeds=[10,11,12]
JUDGED := $(NOW) grid.lr_scales=[1]
EIGHT_SEEDS := grid.seeds=[20,21,22,23,24,25,26,27]
SIX_SEEDS := grid.seeds=[20,21,22,23,24,25]
# An arm of the size of AdamW's updates, at the rate that `tuning` found for those.
matched = ++optimizers.$(1)={base:adamw,lr:4.2e-3,plain_lr:2.4e-2,match_rms:true,$(2)}
ongrid = $(call matched,$(1),weights:quantized$(comma)rounding:stochastic$(comma)$(2))

STUDY_tuning := $(TUNED) grid.baseline=E4M3 grid.formats=[E4M3,E5M2,E3M4] grid.lr_scales=[0.5,0.7,1,1.4,2] \
	grid.optimizers=[adamw,stiff_matched,permuted_matched] \
	optimizers.stiff_matched.lr=3e-3 optimizers.permuted_matched.lr=3e-3

varied = ++optimizers.$(1)={base:adamw,lr:3e-3,plain_lr:$(2),decay:$(3)}
STUDY_tuning-plain := $(TUNED) grid.baseline=E4M3 grid.formats=[E4M3,E1M6] grid.lr_scales=[1] \
	$(call varied,less_decay,2.4e-2,1e-4) $(call varied,more_decay,2.4e-2,1e-3) \
	$(call varied,less_plain,1.2e-2,3e-4) $(call varied,more_plain,4.8e-2,3e-4) \
	grid.optimizers=[adamw,less_decay,more_decay,less_plain,more_plain]

# Every geometry in every format: is a format's own the best for it?
GEOMETRIES := E1M6 E2M5 E3M4 E4M3 E5M2
STUDY_matrix := $(JUDGED) $(EIGHT_SEEDS) grid.baseline=E4M3 grid.formats=$(call list,$(GEOMETRIES)) \
	$(foreach fmt,$(GEOMETRIES),$(call matched,as_$(fmt),stiffness:foreign$(comma)foreign:$(fmt))) \
	grid.optimizers=$(call list,adamw $(addprefix as_,$(GEOMETRIES)))

# The step as a function of the weight's size, without a format: knee (binades below the largest weight) and slope.
KNEES := 1 2 3 4 6 8
SLOPES := 0.5 1 1.5
profile_name = knee$(1)_slope$(subst .,p,$(2))
profiles_of = $(foreach slope,$(2),$(foreach knee,$(1),$(call profile_name,$(knee),$(slope))))
mapped = grid.baseline=virtual.E4M3 grid.formats=[virtual.E4M3] $(foreach slope,$(2),$(foreach knee,$(1),\
	$(call matched,$(call profile_name,$(knee),$(slope)),stiffness:profile$(comma)knee:$(knee)$(comma)slope:$(slope)))) \
	grid.optimizers=$(call list,adamw $(call profiles_of,$(1),$(2)))
STUDY_profile := $(TUNED) grid.lr_scales=[0.7,1,1.4] $(call mapped,$(KNEES),$(SLOPES))

# Does the best place move in longer runs? Rates around those that tuning-800 and tuning-3200 found for such arms.
longer_map = $(filter-out train.steps=%,$(NOW)) train.steps=$(1) grid.seeds=[10,11]
STUDY_profile-800 := $(call longer_map,800) grid.lr_scales=[1.4,2,2.8] $(call mapped,2 4 6 8,$(SLOPES))
STUDY_profile-3200 := $(call longer_map,3200) grid.lr_scales=[0.5,0.7,1] $(call mapped,2 4 8,0.5 1)

# Weights that are values of formats of three to six bits, where resolution binds, and of ones of the same shape with rungs
# 256 times finer.
LOW := E2M1 E1M2 E3M1 E2M2 E2M3 E3M2
LOW_ARMS := $(call ongrid,stiff_matched_sr,stiffness:ulp) $(call ongrid,permuted_matched_sr,stiffness:permuted)
STUDY_tuning-low-bits := $(TUNED) $(LOW_ARMS) grid.recipe=weight_only grid.baseline=E2M3 grid.formats=[E2M1,E2M3,E3M2] \
	grid.lr_scales=[0.35,0.5,0.7,1,1.4] grid.optimizers=[adamw_sr,stiff_matched_sr,permuted_matched_sr]
# The best of five rates on the mean over formats and seeds; that of adamw_sr is the largest tried, 0.0003 below the next.
LOW_RATES := optimizers.adamw_sr.lr=4.2e-3
STUDY_low-bits := $(JUDGED) $(SIX_SEEDS) $(LOW_ARMS) $(LOW_RATES) grid.recipe=weight_only grid.baseline=E2M3 \
	grid.formats=$(call list,$(call twins,$(LOW))) grid.optimizers=[adamw_sr,stiff_matched_sr,permuted_matched_sr]

# What looks at no format: steps relative to a tensor or a row, another optimizer, multiplication.
NO_FORMAT := relative row_relative muon madam
STUDY_tuning-controls := $(TUNED) grid.baseline=E3M4 grid.formats=[E3M4] grid.lr_scales=[0.25,0.5,1,2,4,8,16] \
	grid.optimizers=$(call list,adamw $(NO_FORMAT))
# At the best of those seven rates, and the best place of the map of `profile`.
CONTROL_RATES := optimizers.relative.lr=0.2 optimizers.muon.lr=2.4e-2 optimizers.madam.lr=0.12
BEST_PROFILE := knee:4$(comma)slope:1.5
STUDY_controls := $(JUDGED) $(EIGHT_SEEDS) $(CONTROL_RATES) grid.baseline=E3M4 grid.formats=$(call list,$(call twins,E3M4)) \
	$(call matched,best_profile,stiffness:profile$(comma)$(BEST_PROFILE)) \
	grid.optimizers=$(call list,adamw stiff_matched permuted_matched best_profile $(NO_FORMAT))

# No master weights: what is rounded away stays away, is made up for by chance, or by the momentum.
masterless = ++optimizers.$(1)={base:adamw,lr:3e-3,plain_lr:2.4e-2,weights:quantized,$(2)}
MASTERLESS := $(call masterless,nearest,rounding:nearest) \
	$(call masterless,eco,rounding:nearest$(comma)feedback:momentum) \
	$(call masterless,eco_sr,rounding:stochastic$(comma)feedback:momentum)
STUDY_tuning-masterless := $(TUNED) $(MASTERLESS) grid.baseline=E4M3 grid.formats=[E4M3] \
	grid.lr_scales=[0.35,0.5,0.7,1,1.4,2] grid.optimizers=[nearest,adamw_sr,eco,eco_sr]
# The best of those six for each; those of adamw_sr and eco_sr are the ones that they have.
MASTERLESS_RATES := optimizers.nearest.lr=4.2e-3 optimizers.eco.lr=4.2e-3
STUDY_masterless := $(JUDGED) $(SIX_SEEDS) $(MASTERLESS) $(LOW_ARMS) $(MASTERLESS_RATES) grid.baseline=E4M3 \
	grid.formats=[E4M3,E3M4] grid.optimizers=[adamw,nearest,adamw_sr,eco,eco_sr,stiff_matched_sr]

# The update rules that the bench began with, each against the plain arm of its regime, at rates of their own.
BEGAN_WITH := adamw stiff_grad riemann adamw_sr rung
STUDY_tuning-arms := $(TUNED) grid.baseline=E3M4 grid.formats=[E3M4] grid.lr_scales=[0.35,0.5,0.7,1,1.4,2] \
	grid.optimizers=$(call list,$(filter-out adamw,$(BEGAN_WITH)))
STUDY_tuning-arms-higher := $(TUNED) grid.baseline=E3M4 grid.formats=[E3M4] grid.lr_scales=[2.8,4,5.6] \
	grid.optimizers=[riemann,rung]
# The best of those rates for each, between two others.
ARMS_RATES := optimizers.adamw_sr.lr=4.2e-3 optimizers.riemann.lr=4e-3 optimizers.rung.lr=4.0
STUDY_arms := $(JUDGED) $(SIX_SEEDS) $(ARMS_RATES) grid.baseline=E3M4 grid.formats=$(call list,$(call twins,E3M4)) \
	grid.optimizers=$(call list,$(BEGAN_WITH))

# Training four and sixteen times as long, at rates of its own.
LASTING := adamw stiff_matched best_profile muon
lasting = $(filter-out train.steps=%,$(NOW)) train.steps=$(1) grid.baseline=E3M4 optimizers.muon.lr=2.4e-2 \
	$(call matched,best_profile,stiffness:profile$(comma)$(BEST_PROFILE)) grid.optimizers=$(call list,$(LASTING))
rates = $(foreach rate,$(join adamw stiff_matched best_profile muon,$(addprefix .lr=,$(1) $(2) $(3) $(4))),optimizers.$(rate))
STUDY_tuning-800 := $(call lasting,800) grid.formats=[E3M4] grid.seeds=[10,11] grid.lr_scales=[0.35,0.5,0.7,1,1.4,2,2.8]
STUDY_tuning-800-higher := $(filter-out grid.optimizers=%,$(call lasting,800)) grid.formats=[E3M4] grid.seeds=[10,11] \
	grid.optimizers=[stiff_matched] grid.lr_scales=[4,5.6]
# The best of those seven for each, or of nine.
RATES_800 := $(call rates,6e-3,1.176e-2,8.4e-3,1.2e-2)
STUDY_length-800 := $(call lasting,800) $(RATES_800) grid.formats=$(call list,$(call twins,E3M4)) grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]
LONG = $(filter-out grid.optimizers=%,$(call lasting,3200))
STUDY_tuning-3200 := $(call lasting,3200) grid.formats=[E3M4] grid.seeds=[10,11] grid.lr_scales=[0.25,0.35,0.5,0.7,1,1.4]
# The best of those six for each; that of muon is the smallest tried, 0.006 below the next.
RATES_3200 := $(call rates,2.1e-3,4.2e-3,2.94e-3,6e-3)
# Asked after the narrow model, where stiff_matched ends lowest at eight times its rate: is there a second minimum?
STUDY_tuning-3200-higher := $(LONG) grid.formats=[E3M4] grid.seeds=[10,11] grid.optimizers=[stiff_matched] \
	grid.lr_scales=[2,2.8,4,5.6,8,16]
STUDY_length-3200 := $(call lasting,3200) $(RATES_3200) grid.formats=[E3M4] grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]

# Is it the format that loses there, or the profile? AdamW's cells are those of gate-tokens-3200.
STUDY_length-3200-twin := $(LONG) $(RATES_3200) grid.formats=[E3M4,virtual.E3M4] \
	grid.optimizers=[adamw,stiff_matched] grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]

# Or is it that the geometry stays to the end? Its exponent falls from 1 to 0 over the run, as the rate does.
fading = $(LONG) $(call matched,stiff_fading,stiffness:ulp$(comma)schedule:cosine) \
	grid.formats=[E3M4]
STUDY_tuning-3200-fading := $(fading) grid.optimizers=[stiff_fading] grid.lr_scales=[0.35,0.5,0.7,1,1.4] grid.seeds=[10,11]
# The best of those five for the one that fades is the rate that it has.
STUDY_length-3200-fading := $(fading) $(RATES_3200) grid.optimizers=[adamw,stiff_matched,stiff_fading] grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]

# Or is it what all arms share, decay and the rate of embeddings, which 200 steps fixed? One of the two changed at a time.
DECAYS := 0 1e-4 3e-4 1e-3
OTHER_PLAIN := 6e-3 1.2e-2
LONG_adamw := base:adamw$(comma)lr:2.1e-3
LONG_stiff := base:adamw$(comma)lr:4.2e-3$(comma)stiffness:ulp$(comma)match_rms:true
long_name = $(1)_$(subst -,m,$(subst .,p,$(2)_$(3)))
with_shared = ++optimizers.$(call long_name,$(2),$(3),$(4))={$($(1)_$(2)),decay:$(3),plain_lr:$(4)}
long = $(call with_shared,LONG,$(1),$(2),$(3))
either = $(foreach arm,adamw stiff,$(call $(1),$(2),$(arm)))
shared = $(LONG) grid.formats=[E3M4] grid.lr_scales=[1] grid.seeds=[10,11] \
	$(call either,$(1),long) grid.optimizers=$(call list,$(call either,$(1),long_name))
one_changed = $(foreach decay,$(DECAYS),$(call $(1),$(2),$(decay),2.4e-2)) \
	$(foreach rate,$(OTHER_PLAIN),$(call $(1),$(2),3e-4,$(rate)))
higher_plain = $(call $(1),$(2),3e-4,4.8e-2)
highest_plain = $(foreach rate,9.6e-2 1.92e-1,$(call $(1),$(2),3e-4,$(rate)))
STUDY_tuning-3200-shared := $(call shared,one_changed)
STUDY_tuning-3200-shared-higher := $(call shared,higher_plain)
# The best of each: no decay for adamw, 0.0004 below the one it has; all else as it was.
STUDY_length-3200-shared := $(LONG) $(RATES_3200) optimizers.adamw.decay=0 \
	grid.formats=[E3M4] grid.optimizers=[adamw,stiff_matched] grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]

# Or is it unequal steps as such, whatever weights they fall on?
STUDY_tuning-3200-permuted := $(LONG) grid.formats=[E3M4] grid.optimizers=[permuted_matched] \
	grid.lr_scales=[0.35,0.5,0.7,1,1.4] grid.seeds=[10,11]
# The best of those five is the rate that it has.
STUDY_length-3200-permuted := $(LONG) $(RATES_3200) grid.formats=[E3M4] grid.optimizers=[adamw,stiff_matched,permuted_matched] \
	grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]
# Or is it the rate, which is twice AdamW's? One size of step for all weights, that of stiff_matched.
STUDY_length-3200-rate := $(LONG) $(RATES_3200) $(call matched,mean_matched,stiffness:mean) grid.formats=[E3M4] \
	grid.optimizers=[adamw,stiff_matched,mean_matched] grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]

# After so many steps, or after so many tokens? As many steps of a quarter of the batch, a quarter of them of four times it.
batched = $(filter-out grid.optimizers=%,$(call lasting,$(1))) train.batch=$(2) grid.formats=[E3M4] \
	grid.optimizers=[adamw,stiff_matched]
STUDY_tuning-3200-batch-4 := $(call batched,3200,4) grid.lr_scales=[0.25,0.35,0.5,0.7,1] grid.seeds=[10,11]
STUDY_tuning-800-batch-64 := $(call batched,800,64) grid.lr_scales=[1,1.4,2,2.8,4] grid.seeds=[10,11]
# The largest was the best of five, of stiff_matched in the one and of both in the other.
STUDY_tuning-3200-batch-4-higher := $(filter-out grid.optimizers=%,$(call batched,3200,4)) grid.optimizers=[stiff_matched] \
	grid.lr_scales=[1.4,2] grid.seeds=[10,11]
STUDY_tuning-800-batch-64-higher := $(call batched,800,64) grid.lr_scales=[5.6,8] grid.seeds=[10,11]
# The best of those for each, between two others.
STUDY_length-3200-batch-4 := $(call batched,3200,4) optimizers.adamw.lr=1.5e-3 optimizers.stiff_matched.lr=4.2e-3 \
	grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]
STUDY_length-800-batch-64 := $(call batched,800,64) optimizers.adamw.lr=1.68e-2 optimizers.stiff_matched.lr=2.352e-2 \
	grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]

# The corner where the gain was lost, with embeddings a quarter as fast.
STUDY_length-3200-slow := $(filter-out $(addsuffix %,optimizers.adamw.plain_lr= optimizers.stiff_matched.plain_lr=),$(LONG)) \
	$(RATES_3200) optimizers.adamw.plain_lr=6e-3 optimizers.stiff_matched.plain_lr=6e-3 \
	grid.formats=[E3M4] grid.optimizers=[adamw,stiff_matched] grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]

# As long trained, in models of half and of twice the width.
of_width = $(filter-out grid.optimizers=%,$(call lasting,3200)) models.pico.width=$(1) grid.formats=[E3M4] \
	grid.optimizers=[adamw,stiff_matched]
tuned_width = $(call of_width,$(1)) optimizers.adamw.lr=2.1e-3 optimizers.stiff_matched.lr=4.2e-3 \
	grid.lr_scales=[0.25,0.5,1,2] grid.seeds=[10,11]
STUDY_tuning-3200-narrow := $(call tuned_width,32)
# The largest was the best of four for both.
STUDY_tuning-3200-narrow-higher := $(filter-out grid.lr_scales=%,$(STUDY_tuning-3200-narrow)) grid.lr_scales=[4,8]
STUDY_tuning-3200-narrow-highest := $(filter-out grid.lr_scales=% grid.optimizers=%,$(STUDY_tuning-3200-narrow)) \
	grid.optimizers=[stiff_matched] grid.lr_scales=[16]
STUDY_tuning-3200-wide := $(call tuned_width,128)
# The best of those for each, between two others.
judged_width = $(call of_width,$(1)) optimizers.adamw.lr=$(2) optimizers.stiff_matched.lr=$(3) grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]
STUDY_length-3200-narrow := $(call judged_width,32,4.2e-3,3.36e-2)
STUDY_length-3200-wide := $(call judged_width,128,1.05e-3,2.1e-3)
KEPT_length-3200-narrow := length-3200-widths/narrow
KEPT_length-3200-wide := length-3200-widths/wide

# What the smallest weights of each arm are worth.
PRUNED := adamw stiff_matched permuted_matched mean_matched
STUDY_length-3200-pruned := $(LONG) $(RATES_3200) $(call matched,mean_matched,stiffness:mean) grid.formats=[E3M4] \
	grid.optimizers=$(call list,$(PRUNED)) grid.lr_scales=[1] grid.seeds=[25,26,27,28,29]
pruned = python -m altgrad.diagnostics prune \
	$(foreach arm,$(2),$(foreach seed,$(3),E3M4-$(arm)-$(seed)-1)) --out reports/study/$(1)/pruned.csv
AFTER_length-3200-pruned = $(call pruned,length-3200-pruned,$(PRUNED),25 26 27 28 29)
AFTER_length-3200-batch-4 = $(call pruned,length-3200-batch-4,adamw stiff_matched,20 21 22 23 24)
AFTER_length-800-batch-64 = $(call pruned,length-800-batch-64,adamw stiff_matched,20 21 22 23 24)

# Whole rungs on weights without masters, as long trained, and rungs 256 times finer beside them.
masterless-3200 = $(LONG) grid.optimizers=[adamw_sr,rung]
STUDY_tuning-3200-masterless := $(masterless-3200) optimizers.adamw_sr.lr=4.2e-3 optimizers.rung.lr=4.0 grid.formats=[E3M4] \
	grid.lr_scales=[0.25,0.35,0.5,0.7,1] grid.seeds=[10,11]
# The best of those five for each, between two others; adamw_sr is 0.0001 higher at half.
LENGTH_MASTERLESS := $(masterless-3200) optimizers.adamw_sr.lr=2.94e-3 optimizers.rung.lr=1.4 grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]
STUDY_length-3200-masterless := $(LENGTH_MASTERLESS) grid.formats=[E3M4]
STUDY_length-3200-masterless-twin := $(LENGTH_MASTERLESS) grid.formats=$(call list,$(call twins,E3M4))

# Masters and none in one part, on other seeds, at the rates of those two lengths.
STUDY_length-3200-masters := $(filter-out grid.optimizers=%,$(masterless-3200)) optimizers.adamw.lr=2.1e-3 \
	optimizers.adamw_sr.lr=2.94e-3 grid.optimizers=[adamw,adamw_sr] grid.lr_scales=[1] grid.seeds=[25,26,27,28,29] \
	grid.formats=$(call list,$(call twins,E3M4))

# What quantizing the weights of trained models costs, by how long they were trained: the cells of AdamW of three lengths.
gate-tokens = $(filter-out grid.baseline=% grid.optimizers=%,$(call lasting,$(1))) $(RATES_$(1)) grid.formats=[virtual.E3M4] \
	grid.baseline=virtual.E3M4 grid.optimizers=[adamw] grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]
quantized-after = python -m altgrad.diagnostics ptq $(foreach seed,20 21 22 23 24,virtual.E3M4-adamw-$(seed)-1) \
	--weights-only --formats E1M1 E2M0 E1M2 E2M1 E3M0 --out reports/study/gate-tokens/$(1)/after.csv
$(foreach steps,200 800 3200,\
	$(eval STUDY_gate-tokens-$(steps) = $$(call gate-tokens,$(steps)))\
	$(eval AFTER_gate-tokens-$(steps) = $$(call quantized-after,$(steps)))\
	$(eval KEPT_gate-tokens-$(steps) := gate-tokens/$(steps)))

# Eight times the parameters, at rates of its own.
LARGER := adamw stiff_matched
larger = $(filter-out model=% tokenizer.% grid.optimizers=%,$(call lasting,$(1))) model=nano tokenizer.vocab_size=4096 \
	grid.optimizers=$(call list,$(LARGER))
STUDY_tuning-nano := $(call larger,400) grid.formats=[E3M4] grid.seeds=[10,11] grid.lr_scales=[0.25,0.5,1,2]
# The best of those four for both.
RATES_nano := optimizers.adamw.lr=1.5e-3 optimizers.stiff_matched.lr=2.1e-3
LADDER_NANO := $(call larger,400) $(RATES_nano) grid.lr_scales=[1] grid.seeds=[20,21,22,23,24]
STUDY_ladder-nano := $(LADDER_NANO) grid.formats=[E3M4]
STUDY_ladder-nano-twin := $(LADDER_NANO) grid.formats=$(call list,$(call twins,E3M4))

# Is what 200 steps of the smallest model fixed right for it, decay and the rate of embeddings? One of the two at a time.
NANO_adamw := base:adamw$(comma)lr:1.5e-3
NANO_stiff := base:adamw$(comma)lr:2.1e-3$(comma)stiffness:ulp$(comma)match_rms:true
nano = $(call with_shared,NANO,$(1),$(2),$(3))
shared-nano = $(filter-out grid.optimizers=%,$(call larger,400)) grid.formats=[E3M4] grid.lr_scales=[1] grid.seeds=[10,11] \
	$(call either,$(1),nano) grid.optimizers=$(call list,$(call either,$(1),long_name))
STUDY_tuning-nano-shared := $(call shared-nano,one_changed)
STUDY_tuning-nano-shared-higher := $(call shared-nano,higher_plain)
STUDY_tuning-nano-shared-highest := $(call shared-nano,highest_plain)
# The best of each: embeddings four times as fast for both, a third of the decay for adamw, none for the other.
STUDY_ladder-nano-shared := \
	$(filter-out $(addsuffix %,optimizers.adamw.plain_lr= optimizers.stiff_matched.plain_lr=),$(LADDER_NANO)) \
	grid.formats=[E3M4] optimizers.adamw.plain_lr=9.6e-2 optimizers.stiff_matched.plain_lr=9.6e-2 \
	optimizers.adamw.decay=1e-4 ++optimizers.stiff_matched.decay=0

# Five tokens per parameter. One seed for three rates: a cell takes 12 minutes of a core.
STUDY_tuning-nano-3300 := $(call larger,3300) grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[0.25,0.5,1]
STUDY_tuning-nano-3300-lower := $(call larger,3300) grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[0.125]
# The best of those four for both.
RATES_nano-3300 := optimizers.adamw.lr=7.5e-4 optimizers.stiff_matched.lr=1.05e-3
STUDY_ladder-nano-3300 := $(call larger,3300) $(RATES_nano-3300) grid.formats=[E3M4] grid.lr_scales=[1] \
	grid.seeds=[20,21,22,23,24]

# Thirty-five times the parameters and the tokens of ladder-nano. A thread each, so that two cells train on two cores.
largest = $(filter-out model=% grid.optimizers=%,$(call larger,$(1))) model=micro models.micro.threads=1 train.batch=8 \
	grid.optimizers=$(call list,$(LARGER))
STUDY_tuning-micro := $(call largest,400) grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[0.125,0.25,0.5]
STUDY_tuning-micro-lower := $(call largest,400) grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[0.0625]
# The best of those four for both, between two others.
RATES_micro := optimizers.adamw.lr=3.75e-4 optimizers.stiff_matched.lr=5.25e-4
LADDER_MICRO := $(call largest,400) $(RATES_micro) grid.lr_scales=[1] grid.seeds=[20,21,22]
STUDY_ladder-micro := $(LADDER_MICRO) grid.formats=[E3M4]
STUDY_ladder-micro-twin := $(LADDER_MICRO) grid.formats=$(call list,$(call twins,E3M4))

# The formats and the other arms there: the best control and those without masters, at rates of their own.
STUDY_ladder-micro-formats := $(filter-out grid.baseline=%,$(LADDER_MICRO)) grid.baseline=E4M3 \
	grid.formats=[E4M3,E5M2,E3M4,E1M6]
STUDY_tuning-micro-arms := $(filter-out grid.optimizers=% optimizers.muon.lr=%,$(call largest,400)) optimizers.muon.lr=1.2e-2 \
	optimizers.adamw_sr.lr=1.05e-3 optimizers.rung.lr=2.0 grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[0.25,0.5,1] \
	grid.optimizers=[muon,adamw_sr,rung]
STUDY_tuning-micro-arms-higher := $(filter-out grid.optimizers=% optimizers.muon.lr=%,$(call largest,400)) \
	optimizers.muon.lr=1.2e-2 \
	optimizers.rung.lr=2.0 grid.formats=[E3M4] grid.seeds=[10] grid.lr_scales=[2] grid.optimizers=[muon,rung]
# The best of those three for adamw_sr, of four for the others, each between two others.
STUDY_ladder-micro-arms := $(filter-out grid.optimizers=% optimizers.muon.lr=%,$(LADDER_MICRO)) \
	optimizers.permuted_matched.lr=5.25e-4 \
	optimizers.muon.lr=1.2e-2 optimizers.adamw_sr.lr=5.25e-4 optimizers.rung.lr=2.0 grid.formats=[E3M4] \
	grid.optimizers=[adamw,stiff_matched,permuted_matched,muon,adamw_sr,rung]

# Seventy times the parameters, as many steps and tokens.
STUDY_tuning-mini := $(subst micro,mini,$(call largest,400)) grid.formats=[E3M4] grid.seeds=[10] \
	grid.lr_scales=[0.0625,0.125,0.25]
# The best of those three for both, the rates of micro.
LADDER_MINI := $(subst micro,mini,$(LADDER_MICRO))
STUDY_ladder-mini := $(LADDER_MINI) grid.formats=[E3M4]
STUDY_ladder-mini-twin := $(LADDER_MINI) grid.formats=$(call list,$(call twins,E3M4))

# The formats in the larger model, beside the same step sizes at the wrong weights, at the rate of stiff_matched.
STUDY_ladder-nano-formats := $(filter-out grid.optimizers=% grid.baseline=%,$(LADDER_NANO)) \
	optimizers.permuted_matched.lr=2.1e-3 \
	grid.optimizers=[adamw,stiff_matched,permuted_matched] grid.baseline=E4M3 grid.formats=[E4M3,E5M2,E3M4,E1M6]

# The other arms in the larger model: the best two of `controls`, and those without masters.
OTHERS := best_profile muon adamw_sr rung
STUDY_tuning-nano-arms := $(filter-out grid.optimizers=%,$(call larger,400)) optimizers.adamw_sr.lr=4.2e-3 \
	optimizers.rung.lr=4.0 \
	grid.formats=[E3M4] grid.seeds=[10,11] grid.lr_scales=[0.25,0.5,1] grid.optimizers=$(call list,$(OTHERS))
STUDY_tuning-nano-arms-lower := $(filter-out grid.optimizers=%,$(call larger,400)) optimizers.adamw_sr.lr=4.2e-3 \
	grid.formats=[E3M4] grid.seeds=[10,11] grid.lr_scales=[0.125] grid.optimizers=[adamw_sr]
# The best of those three for each, or of four.
STUDY_ladder-nano-arms := $(filter-out grid.optimizers=% optimizers.muon.lr=%,$(LADDER_NANO)) \
	optimizers.best_profile.lr=2.1e-3 \
	optimizers.muon.lr=1.2e-2 optimizers.adamw_sr.lr=1.05e-3 optimizers.rung.lr=2.0 grid.formats=[E3M4] \
	grid.optimizers=$(call list,adamw $(OTHERS))
STUDY_ladder-nano-arms-twin := $(filter-out grid.formats=% grid.optimizers=%,$(STUDY_ladder-nano-arms)) \
	grid.formats=$(call list,$(call twins,E3M4)) grid.optimizers=[adamw_sr,rung]

# What a better optimizer gains where nothing is quantized, which the virtual twin is to it.
STUDY_ladder-nano-bf16 := $(filter-out grid.formats=% grid.optimizers=%,$(STUDY_ladder-nano-arms)) \
	grid.formats=$(call list,$(call twins,E3M4)) grid.optimizers=[adamw,muon,adamw_sr,rung]
STUDY_ladder-nano-muon := $(filter-out grid.baseline=% grid.formats=% grid.optimizers=%,$(STUDY_ladder-nano-arms)) \
	grid.baseline=E4M3 grid.formats=[E4M3,E5M2,E3M4,E1M6] grid.optimizers=[adamw,muon]

# Whole rungs without masters in other formats. A rung is a step of another size in each, so that each has rates of its own.
IN_RUNGS := E4M3 E5M2 E1M6
RUNGS_ARMS := grid.baseline=E4M3 grid.formats=$(call list,$(IN_RUNGS)) grid.optimizers=[adamw_sr,rung]
STUDY_tuning-rungs := $(TUNED) $(RUNGS_ARMS) optimizers.adamw_sr.lr=4.2e-3 optimizers.rung.lr=4.0 \
	grid.lr_scales=[0.25,0.35,0.5,0.7,1,1.4,2]
# The smallest was the best of seven for rungs in E5M2.
STUDY_tuning-rungs-lower := $(TUNED) grid.baseline=E5M2 grid.formats=[E5M2] grid.optimizers=[rung] optimizers.rung.lr=4.0 \
	grid.lr_scales=[0.125,0.175]
# The best of those for each; that of adamw_sr is the same in all three.
rungs = $(JUDGED) $(SIX_SEEDS) grid.baseline=$(1) grid.formats=$(call list,$(call twins,$(1))) \
	grid.optimizers=[adamw,adamw_sr,rung] optimizers.adamw_sr.lr=2.94e-3 optimizers.rung.lr=$(2)
STUDY_rungs-E4M3 := $(call rungs,E4M3,2.0)
STUDY_rungs-E5M2 := $(call rungs,E5M2,1.0)
STUDY_rungs-E1M6 := $(call rungs,E1M6,5.6)
$(foreach fmt,$(IN_RUNGS),\
	$(eval KEPT_rungs-$(fmt) := rungs/$(fmt))\
	$(eval KEPT_ladder-nano-rungs-$(fmt) := ladder-nano-rungs/$(fmt))\
	$(eval KEPT_ladder-micro-rungs-$(fmt) := ladder-micro-rungs/$(fmt)))

# Around what of E3M4's rate each format takes in the smallest model: half, a quarter and 1.4 times.
of_size = $(filter-out grid.baseline=% grid.optimizers=%,$(call $(1),400)) grid.baseline=$(2) grid.formats=[$(2)]
tuned_rungs = $(call of_size,$(1),$(2)) optimizers.rung.lr=$(3) grid.optimizers=[rung] grid.seeds=[10] grid.lr_scales=[0.5,1,2]
STUDY_tuning-nano-rungs-E4M3 := $(call tuned_rungs,larger,E4M3,1.0)
STUDY_tuning-nano-rungs-E4M3-higher := $(filter-out grid.lr_scales=%,$(STUDY_tuning-nano-rungs-E4M3)) grid.lr_scales=[4]
STUDY_tuning-nano-rungs-E5M2 := $(call tuned_rungs,larger,E5M2,0.5)
STUDY_tuning-nano-rungs-E1M6 := $(call tuned_rungs,larger,E1M6,2.8)

# The best of those for each, between two others.
NANO_BESIDE := $(RATES_nano) optimizers.adamw_sr.lr=1.05e-3 grid.seeds=[20,21,22,23,24]
judged_rungs = $(call of_size,$(1),$(2)) $(3) optimizers.rung.lr=$(4) grid.optimizers=[adamw,adamw_sr,rung] grid.lr_scales=[1]
STUDY_ladder-nano-rungs-E4M3 := $(call judged_rungs,larger,E4M3,$(NANO_BESIDE),2.0)
STUDY_ladder-nano-rungs-E5M2 := $(call judged_rungs,larger,E5M2,$(NANO_BESIDE),0.5)
STUDY_ladder-nano-rungs-E1M6 := $(call judged_rungs,larger,E1M6,$(NANO_BESIDE),2.8)
# The same arms on rungs 256 times finer: which of those are the format's own?
finer = $(filter-out grid.baseline=% grid.formats=% grid.optimizers=%,$(STUDY_ladder-$(1)-rungs-$(2))) \
	grid.baseline=virtual.$(2) grid.formats=[virtual.$(2)] grid.optimizers=[adamw_sr,rung]
$(foreach fmt,$(IN_RUNGS),$(foreach size,nano micro,\
	$(eval STUDY_ladder-$(size)-rungs-virtual.$(fmt) = $$(call finer,$(size),$(fmt)))\
	$(eval KEPT_ladder-$(size)-rungs-virtual.$(fmt) := ladder-$(size)-rungs/virtual.$(fmt))))

# E1M6's own part again, the only one above zero: other seeds, and both arms tuned in the format and without it.
both_arms = $(filter-out grid.baseline=% grid.optimizers=%,$(call larger,400)) grid.baseline=$(1) \
	grid.optimizers=[adamw_sr,rung]
STUDY_tuning-nano-rungs-own := $(call both_arms,E1M6) grid.formats=$(call list,$(call twins,E1M6)) \
	optimizers.adamw_sr.lr=1.05e-3 optimizers.rung.lr=2.8 grid.lr_scales=[0.7,1,1.4] grid.seeds=[10,11]
# The largest was the best of three for adamw_sr, the smallest for rung: twice the one, half the other.
STUDY_tuning-nano-rungs-own-further := $(call both_arms,E1M6) grid.formats=$(call list,$(call twins,E1M6)) \
	optimizers.adamw_sr.lr=2.1e-3 optimizers.rung.lr=1.4 grid.lr_scales=[1] grid.seeds=[10,11]
# The best of four for each, the same in the format and without it, between two others.
$(foreach entry,E1M6 virtual.E1M6,\
	$(eval STUDY_ladder-nano-rungs-own-$(entry) := $$(call both_arms,$(entry)) grid.formats=[$(entry)] \
	optimizers.adamw_sr.lr=1.47e-3 optimizers.rung.lr=1.96 grid.lr_scales=[1] grid.seeds=[30,31,32,33,34,35,36,37])\
	$(eval KEPT_ladder-nano-rungs-own-$(entry) := ladder-nano-rungs-own/$(entry)))

# And with 5.8 M parameters, around the rates of 1.3 M.
STUDY_tuning-micro-rungs-E4M3 := $(call tuned_rungs,largest,E4M3,2.0)
STUDY_tuning-micro-rungs-E5M2 := $(call tuned_rungs,largest,E5M2,0.5)
STUDY_tuning-micro-rungs-E1M6 := $(call tuned_rungs,largest,E1M6,2.8)
# The smallest was the best of three for both.
STUDY_tuning-micro-rungs-E4M3-lower := $(filter-out grid.lr_scales=%,$(STUDY_tuning-micro-rungs-E4M3)) grid.lr_scales=[0.25]
STUDY_tuning-micro-rungs-E1M6-lower := $(filter-out grid.lr_scales=%,$(STUDY_tuning-micro-rungs-E1M6)) grid.lr_scales=[0.25]
STUDY_tuning-micro-rungs-E1M6-lowest := $(filter-out grid.lr_scales=%,$(STUDY_tuning-micro-rungs-E1M6)) grid.lr_scales=[0.125]
# The best of those for each, between two others.
MICRO_BESIDE := $(RATES_micro) optimizers.adamw_sr.lr=5.25e-4 grid.seeds=[20,21,22]
STUDY_ladder-micro-rungs-E4M3 := $(call judged_rungs,largest,E4M3,$(MICRO_BESIDE),1.0)
STUDY_ladder-micro-rungs-E5M2 := $(call judged_rungs,largest,E5M2,$(MICRO_BESIDE),0.5)
STUDY_ladder-micro-rungs-E1M6 := $(call judged_rungs,largest,E1M6,$(MICRO_BESIDE),0.7)
STUDY_ladder-micro-muon := $(filter-out grid.optimizers=% optimizers.muon.lr=%,$(STUDY_ladder-micro-formats)) \
	optimizers.muon.lr=1.2e-2 grid.optimizers=[adamw,muon]

# Decay and the rate of embeddings there, one of the two changed at a time, after what they had.
MICRO_adamw := base:adamw$(comma)lr:3.75e-4
MICRO_stiff := base:adamw$(comma)lr:5.25e-4$(comma)stiffness:ulp$(comma)match_rms:true
micro = $(call with_shared,MICRO,$(1),$(2),$(3))
few_changed = $(foreach decay,3e-4 0,$(call $(1),$(2),$(decay),2.4e-2)) \
	$(foreach rate,4.8e-2 9.6e-2,$(call $(1),$(2),3e-4,$(rate)))
shared-micro = $(filter-out grid.optimizers=%,$(call largest,400)) grid.formats=[E3M4] grid.lr_scales=[1] grid.seeds=[10] \
	$(call either,$(1),micro) grid.optimizers=$(call list,$(call either,$(1),long_name))
STUDY_tuning-micro-shared := $(call shared-micro,few_changed)
# The best of each: no decay for both, embeddings twice as fast for the arm with the geometry.
STUDY_ladder-micro-shared := $(filter-out optimizers.stiff_matched.plain_lr=%,$(LADDER_MICRO)) grid.formats=[E3M4] \
	optimizers.stiff_matched.plain_lr=4.8e-2 optimizers.adamw.decay=0 ++optimizers.stiff_matched.decay=0

# Multiplicative steps on weights without masters, as LNS-Madam's: of all formats E4M3 has as many values a binade as that.
MADAM_SR := ++optimizers.madam_sr={base:madam,lr:0.12,plain_lr:2.4e-2,weights:quantized,rounding:stochastic}
STUDY_tuning-madam := $(TUNED) $(MADAM_SR) grid.baseline=E4M3 grid.formats=[E4M3] optimizers.madam.lr=0.12 \
	grid.optimizers=[madam,madam_sr] grid.lr_scales=[0.25,0.5,1,2]
# For both the best of those is the one that they have.
STUDY_madam := $(JUDGED) $(SIX_SEEDS) $(MADAM_SR) grid.baseline=E4M3 grid.formats=$(call list,$(call twins,E4M3)) \
	optimizers.madam.lr=0.12 optimizers.adamw_sr.lr=2.94e-3 grid.optimizers=[adamw,adamw_sr,madam,madam_sr]

# What `ladder-nano-formats` and `ladder-nano-muon` train, in the smallest model.
FORMATS_PICO := $(JUDGED) $(EIGHT_SEEDS) grid.baseline=E4M3 grid.formats=[E4M3,E5M2,E3M4,E1M6]
STUDY_formats := $(FORMATS_PICO) grid.optimizers=[adamw,stiff_matched,permuted_matched]
STUDY_formats-muon := $(FORMATS_PICO) optimizers.muon.lr=2.4e-2 grid.optimizers=[adamw,muon]

# Every 8-bit split with its twin; E0M7 has the values of E1M6.
STUDY_splits := $(filter-out grid.formats=%,$(FORMATS_PICO)) grid.optimizers=[adamw,stiff_matched] \
	grid.formats=$(call list,$(call twins,E1M6 E2M5 E3M4 E4M3 E5M2 E6M1 E7M0))

# The null in each format in the model of 5.8 M parameters, and the arms without masters there on rungs 256 times finer.
STUDY_ladder-micro-null := $(filter-out grid.optimizers=%,$(STUDY_ladder-micro-formats)) \
	optimizers.permuted_matched.lr=5.25e-4 grid.optimizers=[adamw,stiff_matched,permuted_matched]
STUDY_ladder-micro-arms-twin := $(filter-out grid.formats=% grid.optimizers=%,$(STUDY_ladder-micro-arms)) \
	grid.formats=$(call list,$(call twins,E3M4)) grid.optimizers=[adamw_sr,rung]

# Three hundred and 740 times the parameters, for a GPU, as many steps and tokens; and 5.8 M for eight times as many.
# Weights are written down once, at the end.
MODEL_m50 := ++models.m50={layers:12,width:576,heads:9,context:256}
MODEL_m124 := ++models.m124={layers:17,width:768,heads:12,context:256}
MODEL_micro := models.micro.threads=1
on_gpu = $(filter-out model=% grid.optimizers=%,$(call larger,$(2))) model=$(1) $(MODEL_$(1)) train.batch=8 \
	train.eval_every=400 train.checkpoint_every=3300 monitor.every=400 monitor.probes=1 grid.formats=[E3M4]
TUNED_ON_GPU := grid.seeds=[10] grid.lr_scales=[0.03125,0.0625,0.125,0.25] grid.optimizers=$(call list,$(LARGER))
STUDY_tuning-m50 := $(call on_gpu,m50,400) $(TUNED_ON_GPU)
STUDY_tuning-m50-lower := $(filter-out grid.lr_scales=% grid.optimizers=%,$(STUDY_tuning-m50)) grid.lr_scales=[0.015625] \
	grid.optimizers=[adamw]
STUDY_tuning-m124 := $(call on_gpu,m124,400) $(TUNED_ON_GPU)
STUDY_tuning-m124-lower := $(filter-out grid.lr_scales=%,$(STUDY_tuning-m124)) grid.lr_scales=[0.0078125,0.015625]
STUDY_tuning-micro-3300 := $(call on_gpu,micro,3300) $(TUNED_ON_GPU)
# The best of those for each, between two others; that of permuted_matched is that of stiff_matched.
judged_on_gpu = $(call on_gpu,$(1),$(2)) optimizers.adamw.lr=$(3) optimizers.stiff_matched.lr=$(4) \
	optimizers.permuted_matched.lr=$(4) grid.lr_scales=[1] grid.seeds=[20,21,22]
with_null = $(filter-out grid.formats=%,$(1)) grid.formats=$(call list,$(call twins,E3M4)) \
	grid.optimizers=[adamw,stiff_matched,permuted_matched]
STUDY_ladder-m50 := $(call with_null,$(call judged_on_gpu,m50,400,9.375e-5,2.625e-4))
STUDY_ladder-m124 := $(call with_null,$(call judged_on_gpu,m124,400,4.6875e-5,6.5625e-5))
STUDY_ladder-micro-3300 := $(call judged_on_gpu,micro,3300,3.75e-4,5.25e-4) grid.optimizers=[adamw,stiff_matched]

# Does the best profile move with size? Around the rates of tuning-nano-arms.
STUDY_profile-nano := $(filter-out grid.baseline=% grid.optimizers=%,$(call larger,400)) grid.seeds=[10,11] \
	grid.lr_scales=[0.5,0.7] $(call mapped,4 6 8,1 1.5)

# The longer runs of that model in the format that most train in.
STUDY_ladder-nano-3300-E4M3 := $(filter-out grid.baseline=%,$(call larger,3300)) $(RATES_nano-3300) grid.baseline=E4M3 \
	grid.formats=[E4M3] grid.lr_scales=[1] grid.seeds=[20,21,22]

# Another kind of text: the documentation that five installed packages carry, at rates of its own.
DOCSTRINGS := scratch/docstrings
TEXTS = test -d $(DOCSTRINGS) || python -m altgrad.data.docstrings $(DOCSTRINGS) torch scipy pandas numpy matplotlib
ON_DOCSTRINGS = $(filter-out corpus=%,$(call lasting,200)) corpus=docstrings \
	++corpora.docstrings={source:local$(comma)path:$(DOCSTRINGS)}
BEFORE_tuning-corpus = $(TEXTS)
BEFORE_corpus = $(TEXTS)
STUDY_tuning-corpus := $(ON_DOCSTRINGS) grid.formats=[E3M4] grid.seeds=[10,11,12] grid.lr_scales=[0.5,0.7,1,1.4,2]
# Each arm's best of those five is the one that it has.
STUDY_corpus := $(ON_DOCSTRINGS) grid.formats=$(call list,$(call twins,E3M4)) grid.lr_scales=[1] $(EIGHT_SEEDS)

# Embeddings and norms at rates of each arm's own, of which the shared 0.024 turned out to be the best in all three.
PLAIN_RATES := 1.2e-2 1.7e-2 2.4e-2 3.4e-2 4.8e-2
at_plain = ++optimizers.$(1)_$(subst -,m,$(subst .,p,$(2)))={base:adamw,$(3),plain_lr:$(2)}
OF_ADAMW := lr:3e-3
OF_MATCHED := lr:4.2e-3,match_rms:true,stiffness
ARMS_PLAIN := $(foreach rate,$(PLAIN_RATES),$(foreach arm,adamw stiff permuted,$(arm)_$(subst -,m,$(subst .,p,$(rate)))))
STUDY_tuning-plain-arms := $(TUNED) grid.baseline=E3M4 grid.formats=[E3M4] grid.lr_scales=[1] \
	$(foreach rate,$(PLAIN_RATES),$(call at_plain,adamw,$(rate),$(OF_ADAMW)) \
	$(call at_plain,stiff,$(rate),$(OF_MATCHED):ulp) $(call at_plain,permuted,$(rate),$(OF_MATCHED):permuted)) \
	grid.optimizers=$(call list,$(ARMS_PLAIN))

# Gates: what others have found, found again. The order of formats under AdamW.
SPLITS := E1M1 E2M0 E1M2 E2M1 E3M0 E1M3 E2M2 E3M1 E0M7 E1M6 E2M5 E3M4 E4M3 E5M2 E6M1 E7M0
STUDY_gate-formats := $(JUDGED) $(SIX_SEEDS) grid.baseline=bf16 grid.formats=$(call list,bf16 $(SPLITS)) grid.optimizers=[adamw]

STUDY_gate-formats-blocks := $(JUDGED) $(SIX_SEEDS) grid.recipe=uniform_block grid.baseline=bf16 \
	grid.formats=[bf16,E1M1,E2M0,E1M2,E2M1,E3M0,E1M3,E2M2,E3M1] grid.optimizers=[adamw]

# Does a mixed recipe that `what-if` picks by SQNR, from the bf16 cell of seed 0, end below one format of equal bits?
# Gradients are quantized to the same width. Weights and inputs all call for one split; gradients call for two.
rule = {layers:"$(1)"$(comma)weight:$(2)$(comma)$(if $(filter head,$(1)),,input:$(2)$(comma))grad:$(3)}
recipe = $(subst $() $(),,++recipes.$(1)=[$(call rule,*,$(2),$(3)) \
	$(foreach layer,$(5),$(comma)$(call rule,$(layer),$(2),$(4)))$(comma)$(call rule,head,$(2),$(6))])
STUDY_what-if := $(JUDGED) grid.seeds=[30,31,32,33,34,35] grid.optimizers=[adamw] grid.baseline=E2M5 grid.recipe=same \
	$(call recipe,same,FORMAT,FORMAT,,,FORMAT) \
	$(call recipe,what_if8,E2M5,E2M5,E3M4,blocks.*.attn.qkv blocks.1.mlp.up,E3M4) \
	$(call recipe,what_if4,E2M1,E3M0,E2M1,blocks.*.attn.out blocks.*.mlp.down,E3M0) \
	grid.formats=[E1M6,E2M5,E3M4,E4M3,what_if8,E1M2,E2M1,E3M0,what_if4]

# Rounding to nearest, gradients by chance, or weights and inputs by chance: in blocks of 4 bits as NVFP4's, and in 8.
chance = $(comma)rounding:stochastic
nvfp4 = {format:E2M1$(comma)granularity:block$(comma)block:16$(comma)scale:E4M3$(1)}
of_8_bits = {format:$(1)$(2)}
OF_ROUNDING := $(call recipe,nvfp4,$(call nvfp4),$(call nvfp4),,,$(call nvfp4)) \
	$(call recipe,nvfp4_grads,$(call nvfp4),$(call nvfp4,$(chance)),,,$(call nvfp4,$(chance))) \
	$(call recipe,nvfp4_forward,$(call nvfp4,$(chance)),$(call nvfp4),,,$(call nvfp4)) \
	$(call recipe,fp8,E4M3,E5M2,,,E5M2) \
	$(call recipe,fp8_grads,E4M3,$(call of_8_bits,E5M2,$(chance)),,,$(call of_8_bits,E5M2,$(chance))) \
	$(call recipe,fp8_forward,$(call of_8_bits,E4M3,$(chance)),E5M2,,,E5M2)
STUDY_gate-rounding := $(JUDGED) $(EIGHT_SEEDS) $(OF_ROUNDING) grid.baseline=nvfp4 grid.optimizers=[adamw] \
	grid.formats=[nvfp4,nvfp4_grads,nvfp4_forward,fp8,fp8_grads,fp8_forward]

# Formats of few and of no significand bits at rates up to far too high ones, with masters and without.
STUDY_no-significand := $(NOW) grid.seeds=[30,31,32] grid.lr_scales=[0.25,1,4,16,64] grid.baseline=E4M3 \
	grid.formats=[E4M3,E5M2,E6M1,E7M0] grid.optimizers=[adamw,adamw_sr]

PARTS := tuning tuning-plain matrix profile profile-800 profile-3200 tuning-low-bits low-bits \
	tuning-controls controls tuning-masterless masterless tuning-arms tuning-arms-higher arms \
	gate-formats gate-formats-blocks gate-rounding tuning-800 tuning-800-higher length-800 tuning-3200 tuning-3200-higher \
	length-3200 tuning-3200-fading length-3200-fading tuning-3200-shared tuning-3200-shared-higher length-3200-shared \
	tuning-3200-permuted length-3200-permuted length-3200-rate \
	tuning-3200-batch-4 tuning-3200-batch-4-higher length-3200-batch-4 \
	tuning-800-batch-64 tuning-800-batch-64-higher length-800-batch-64 length-3200-slow tuning-3200-narrow \
	tuning-3200-narrow-higher tuning-3200-narrow-highest tuning-3200-wide length-3200-narrow length-3200-wide length-3200-pruned \
	tuning-3200-masterless length-3200-masterless length-3200-masterless-twin length-3200-masters \
	gate-tokens-200 gate-tokens-800 gate-tokens-3200 length-3200-twin tuning-nano ladder-nano ladder-nano-twin \
	tuning-nano-shared tuning-nano-shared-higher tuning-nano-shared-highest ladder-nano-shared \
	tuning-nano-3300 tuning-nano-3300-lower ladder-nano-3300 tuning-micro tuning-micro-lower ladder-micro ladder-micro-twin \
	tuning-micro-arms tuning-micro-arms-higher ladder-micro-formats ladder-micro-arms \
	tuning-mini ladder-mini ladder-mini-twin tuning-m50 tuning-m50-lower ladder-m50 tuning-m124 tuning-m124-lower ladder-m124 \
	tuning-micro-3300 ladder-micro-3300 ladder-nano-formats tuning-nano-arms tuning-nano-arms-lower ladder-nano-arms \
	ladder-nano-arms-twin ladder-nano-bf16 ladder-nano-muon formats formats-muon splits tuning-madam madam tuning-rungs \
	tuning-rungs-lower \
	$(foreach part,rungs tuning-nano-rungs ladder-nano-rungs tuning-micro-rungs ladder-micro-rungs,\
	$(addprefix $(part)-,$(IN_RUNGS))) \
	$(foreach size,nano micro,$(addprefix ladder-$(size)-rungs-virtual.,$(IN_RUNGS))) \
	tuning-nano-rungs-E4M3-higher tuning-nano-rungs-own tuning-nano-rungs-own-further \
	$(addprefix ladder-nano-rungs-own-,E1M6 virtual.E1M6) $(addprefix tuning-micro-rungs-,E4M3-lower E1M6-lower E1M6-lowest) \
	ladder-micro-null ladder-micro-muon tuning-micro-shared ladder-micro-shared ladder-micro-arms-twin \
	ladder-nano-3300-E4M3 profile-nano \
	tuning-corpus corpus tuning-plain-arms what-if no-significand
