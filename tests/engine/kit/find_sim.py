def search(rank, world_size):
    from tests.engine.kit.on_sim import first_difference
    from tests.engine.kit.simulated import Case
    from tests.engine.kit.wrong_streams import WRONG

    out = []
    for case in [
        Case(event=e, memory=m, prefetch=p)
        for e in ("another order", "failures", "unshard")
        for m in ("arena", "max_pool", "double_buffer")
        for p in (1, 3)
    ]:
        out.append(
            (
                str(case),
                first_difference(case, WRONG["released under the gather, planned"].defect, range(1, 7)),
            )
        )
    return "\n".join(map(str, out))
