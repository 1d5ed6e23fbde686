"""What crosses ranks while a layer runs and learns.

`collectives`: the one door to torch.distributed. `exchange`: a layer's rows to their experts and back, by a
`trip` of an `all_to_all`; `regroup` puts them in order, `background` lets them travel beside the experts,
and `stamp` refuses to mix two layers' rows. `gradients`: of experts, which replicas share. `plan_choice`
says which collective runs by which plan, `plan_p2p` runs it on the elements that `plan_layout` says.
"""
