"""One-line formulas of all objectives and estimators, by the names that recipes use. Imports no torch.

Notation:

    pi, ref, mu    policy in training, frozen reference, policy that sampled      r      pi / mu
    y, |y|         a completion and its number of tokens                          h      log(pi(y) / ref(y))
    c, w           chosen and rejected completion of a pair                       sg     logistic function
    A, V, R, H     advantage, value, return, entropy                              z      logits
    p, q           teacher and student                                            lse    log-sum-exp
    d, g           temporal-difference error, discount                            f      a network
    x0, eps        data, noise; a, s are their factors at time t

`docs/objectives.md` is checked against this table by `tests/objectives/test_catalog.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ObjectiveInfo:
    """An objective or estimator: its formula on one line, the paper that defines it, and the module that implements it.

    paper: "Authors year" followed by an arXiv number, a DOI or a page of a book.
    module: dotted name below `whorl`.
    """

    name: str
    formula: str
    paper: str
    module: str


_OBJECTIVES = "whorl.objectives."
_METHODS = "whorl.agents."
_ADVANTAGES = _OBJECTIVES + "advantages."

# (name, formula, paper, module)
_LANGUAGE_MODEL = [
    (
        "next_token",
        "lse(z) - z[target] + z_loss lse(z)^2",
        "Shannon 1951; z-loss: Chowdhery et al. 2022, arXiv:2204.02311",
        _OBJECTIVES + "next_token",
    ),
    (
        "sft",
        "- log pi(y|x), over the tokens of the completion only",
        "Ouyang et al. 2022, arXiv:2203.02155",
        _OBJECTIVES + "next_token",
    ),
    (
        "multi_token",
        "- sum over i of log pi(x[t+i] | x[..t])",
        "Gloeckle et al. 2024, arXiv:2404.19737",
        "whorl.models.multi_token",
    ),
    (
        "classification",
        "lse(z) - sum over k of q[k] z[k], q = (1 - e) onehot + e / K",
        "Szegedy et al. 2016, arXiv:1512.00567",
        _OBJECTIVES + "classify",
    ),
    (
        "info_nce",
        "(lse over j of s[i,j] - s[i,i]) / 2 + (lse over j of s[j,i] - s[i,i]) / 2, s = x.y / temperature",
        "van den Oord et al. 2018, arXiv:1807.03748; Radford et al. 2021, arXiv:2103.00020",
        _OBJECTIVES + "contrastive",
    ),
    (
        "load_balance",
        "E sum over experts of f[e] P[e], f the share of choices, P the mean probability",
        "Fedus et al. 2021, arXiv:2101.03961",
        _OBJECTIVES + "routing",
    ),
    (
        "router_z",
        "lse(z)^2 of the router's logits",
        "Zoph et al. 2022, arXiv:2202.08906",
        _OBJECTIVES + "routing",
    ),
]

_DISTILLATION = [
    (
        "forward",
        "KL(p || q), teacher p, student q",
        "Hinton et al. 2015, arXiv:1503.02531",
        _OBJECTIVES + "distil",
    ),
    (
        "reverse",
        "KL(q || p), teacher p, student q",
        "Agarwal et al. 2024, arXiv:2306.13649",
        _OBJECTIVES + "distil",
    ),
    (
        "jensen",
        "b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q",
        "Agarwal et al. 2024, arXiv:2306.13649",
        _OBJECTIVES + "distil",
    ),
]

_PREFERENCES = [
    (
        "dpo",
        "- log sg(beta (h(c) - h(w)))",
        "Rafailov et al. 2023, arXiv:2305.18290",
        _OBJECTIVES + "preference",
    ),
    (
        "ipo",
        "(h(c) - h(w) - 1 / (2 beta))^2",
        "Azar et al. 2023, arXiv:2310.12036",
        _OBJECTIVES + "preference",
    ),
    (
        "simpo",
        "- log sg(beta (log pi(c) / |c| - log pi(w) / |w|) - gamma)",
        "Meng et al. 2024, arXiv:2405.14734",
        _OBJECTIVES + "preference",
    ),
    (
        "orpo",
        "- log P(c) - lambda log sg(log odds P(c) - log odds P(w)), P = pi^(1/|y|)",
        "Hong et al. 2024, arXiv:2403.07691",
        _OBJECTIVES + "preference",
    ),
    (
        "kto",
        "desirable: 1 - sg(beta (h - k)); undesirable: 1 - sg(beta (k - h)); k = KL(pi || ref)",
        "Ethayarajh et al. 2024, arXiv:2402.01306",
        _OBJECTIVES + "preference",
    ),
    (
        "reward_model",
        "- log sg(r(c) - r(w) - margin) + center (r(c) + r(w))^2",
        "Bradley & Terry 1952, doi:10.2307/2334029; Stiennon et al. 2020, arXiv:2009.01325",
        _OBJECTIVES + "reward",
    ),
]

_POLICY_GRADIENTS = [
    (
        "reinforce",
        "- A log pi, A = reward - mean of the batch",
        "Williams 1992, doi:10.1007/BF00992696",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "rloo",
        "- A log pi, A = reward - mean of the group's others",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "ppo",
        "- min(r A, clip(r, 1 - e, 1 + e) A), A from a critic by GAE",
        "Schulman et al. 2017, arXiv:1707.06347",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "grpo",
        "- min(r A, clip(r, 1 - e, 1 + e) A) / |y| + beta k3, A = (reward - group mean) / group std",
        "Shao et al. 2024, arXiv:2402.03300",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "dr_grpo",
        "- min(r A, clip(r, 1 - e, 1 + e) A) / max_completion_tokens, A = reward - group mean",
        "Liu et al. 2025, arXiv:2503.20783",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "dapo",
        "- min(r A, clip(r, 1 - low, 1 + high) A) / tokens of the batch, A as in grpo, high > low",
        "Yu et al. 2025, arXiv:2503.14476",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "gspo",
        "- min(s A, clip(s, 1 - low, 1 + high) A), s = (pi(y) / mu(y))^(1/|y|), A as in grpo",
        "Zheng et al. 2025, arXiv:2507.18071",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "expert_iteration",
        "- log pi(y|x) over the completions that pass, as in sft",
        "Singh et al. 2023, arXiv:2312.06585",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "value_loss",
        "max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2) / 2",
        "Schulman et al. 2017, arXiv:1707.06347 (its code)",
        _OBJECTIVES + "llm_policy",
    ),
    (
        "overlong_reward",
        "0 up to max_length - buffer tokens, then falls linearly to -1 at max_length",
        "Yu et al. 2025, arXiv:2503.14476",
        _OBJECTIVES + "llm_policy",
    ),
]

_AGENTS = [
    ("a2c", "- A log pi + c_v (V - R)^2 / 2 - c_e H",
     "Mnih et al. 2016, arXiv:1602.01783", _OBJECTIVES + "actor_critic"),
    ("impala", "a2c with A and R from v_trace",
     "Espeholt et al. 2018, arXiv:1802.01561", _OBJECTIVES + "actor_critic"),
    ("trpo", "- ratio A, within a KL divergence",
     "Schulman et al. 2015, arXiv:1502.05477", _OBJECTIVES + "actor_critic"),
    ("cpo", "trpo with a limit on the cost",
     "Achiam et al. 2017, arXiv:1705.10528", _OBJECTIVES + "actor_critic"),
    ("dqn", "huber(Q(s, a) - r - g max_b Q'(s', b))",
     "Mnih et al. 2015, doi:10.1038/nature14236", _OBJECTIVES + "action_value"),
    ("a3c", "a2c, its gradient computed by the actors",
     "Mnih et al. 2016, arXiv:1602.01783", _OBJECTIVES + "actor_critic"),
    ("ddpg", "(Q(s, a) - r - g Q'(s', mu'(s')))^2 / 2 and - Q(s, mu(s))",
     "Lillicrap et al. 2016, arXiv:1509.02971", _OBJECTIVES + "action_value"),
    ("td3", "ddpg with the least of two Q', disturbed mu', and fewer steps of mu",
     "Fujimoto et al. 2018, arXiv:1802.09477", _OBJECTIVES + "action_value"),
    ("sac", "(Q(s, a) - r - g (Q'(s', b) - alpha log pi(b)))^2 / 2 and alpha log pi - Q",
     "Haarnoja et al. 2018, arXiv:1812.05905", _OBJECTIVES + "action_value"),
    ("clone", "- log pi(a|s) over the steps of an expert",
     "Pomerleau 1991, doi:10.1162/neco.1991.3.1.88", _METHODS + "imitation.clone"),
    ("dagger", "clone, also in the states that the policy visits",
     "Ross et al. 2011, arXiv:1011.0686", _METHODS + "imitation.clone"),
    ("gail", "ppo with the reward log D(s, a) - log(1 - D(s, a)), D a discriminator of the expert's steps",
     "Ho & Ermon 2016, arXiv:1606.03476", _METHODS + "imitation.gail"),
    ("max-entropy-irl", "- log p(trajectories of the expert) under pi(a|s) = exp(q(s, a) - v(s))",
     "Ziebart et al. 2008 (AAAI)", _METHODS + "imitation.inverse"),
    ("rl2", "ppo of a policy that reads the whole trial",
     "Duan et al. 2016, arXiv:1611.02779", _METHODS + "meta.rl2"),
    ("one-shot", "clone of a policy that reads one demonstration",
     "Duan et al. 2017, arXiv:1703.07326", _METHODS + "meta.one_shot"),
    ("alphazero", "- sum_a pi(a|s) log p(a|s) + (v(s) - z)^2, pi of a search",
     "Silver et al. 2018, doi:10.1126/science.aar6404", _METHODS + "search.alphazero"),
    ("mpc", "(f(s, a) - (s' - s, r))^2, of a model to plan with",
     "Chua et al. 2018, arXiv:1805.12114", _METHODS + "search.mpc"),
]  # fmt: skip

_ESTIMATORS = [
    (
        "discounted_returns",
        "R[t] = reward[t] + g R[t+1]",
        "Sutton & Barto 2018, eq. 3.9",
        _ADVANTAGES + "estimators",
    ),
    (
        "n_step_returns",
        "R[t] = reward[t] + ... + g^(n-1) reward[t+n-1] + g^n V[t+n]",
        "Sutton & Barto 2018, eq. 7.1",
        _ADVANTAGES + "estimators",
    ),
    (
        "gae",
        "A[t] = d[t] + g lambda A[t+1], d[t] = reward[t] + g V[t+1] - V[t]",
        "Schulman et al. 2016, arXiv:1506.02438",
        _ADVANTAGES + "estimators",
    ),
    (
        "td_lambda_returns",
        "R[t] = gae A[t] + V[t]",
        "Sutton & Barto 2018, eq. 12.18",
        _ADVANTAGES + "estimators",
    ),
    (
        "v_trace",
        "R[t] - V[t] = min(r[t], rho) d[t] + g min(r[t], c) (R[t+1] - V[t+1])",
        "Espeholt et al. 2018, arXiv:1802.01561",
        _ADVANTAGES + "estimators",
    ),
    (
        "token_gae",
        "gae over the sampled tokens of each completion",
        "Ziegler et al. 2019, arXiv:1909.08593",
        _ADVANTAGES + "token_gae",
    ),
    (
        "group_advantages",
        "A = (reward - mean) / (std + eps); mean of batch, group, others of it, or earlier batches; std of group or batch",
        "Shao et al. 2024, arXiv:2402.03300; Ahmadian et al. 2024, arXiv:2402.14740",
        _ADVANTAGES + "group_advantages",
    ),
    (
        "importance_weights",
        "truncate: min(r, high); mask: r if low <= r <= high else 0; trace: min(r, high) prod of earlier min(r, 1)",
        "Espeholt et al. 2018, arXiv:1802.01561",
        _ADVANTAGES + "importance",
    ),
    (
        "kl_estimate",
        "k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; d = log pi - log ref",
        "Schulman 2020, http://joschu.net/blog/kl-approx.html",
        _OBJECTIVES + "divergences",
    ),
    (
        "kl_reward",
        "- coef KL, added to the reward of each token",
        "Ziegler et al. 2019, arXiv:1909.08593",
        _OBJECTIVES + "divergences",
    ),
    (
        "adapt_kl_coef",
        "coef (1 + gain clip(KL / target - 1, -0.2, 0.2))",
        "Ziegler et al. 2019, arXiv:1909.08593",
        _OBJECTIVES + "divergences",
    ),
    (
        "calibration",
        "sum over bins of (count / N) |mean probability - observed share|",
        "Naeini et al. 2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599",
        _OBJECTIVES + "reward",
    ),
]

_GENERATIVE = [
    (
        "masked",
        "- 1/t sum over masked i of log p(x0[i] | x_t), t of the row or of its block",
        "Sahoo et al. 2024, arXiv:2406.07524; blocks: Arriola et al. 2025, arXiv:2503.09573",
        _OBJECTIVES + "generative.masked",
    ),
    (
        "ae",
        "|f(g(x0)) - x0|^2, g(x0) of few dimensions",
        "Hinton & Salakhutdinov 2006, doi:10.1126/science.1127647",
        _OBJECTIVES + "generative.diffusion",
    ),
    (
        "vae",
        "- log p(x0 | z) + beta sum over j of max(KL(q(z[j] | x0) || N(0, 1)), free_bits)",
        "Kingma & Welling 2014, arXiv:1312.6114; beta: Higgins et al. 2017; free bits: Kingma et al. 2016, arXiv:1606.04934",
        _OBJECTIVES + "generative.elbo",
    ),
    (
        "vqvae",
        "- log p(x0 | e) + beta |z - e|^2, e the code nearest to z, codes by moving averages; next_token over codes",
        "van den Oord et al. 2017, arXiv:1711.00937",
        _OBJECTIVES + "generative.codes",
    ),
    (
        "ddpm",
        "|f(a x0 + s eps, t) - target|^2, target eps, x0 or v = a eps - s x0",
        "Ho et al. 2020, arXiv:2006.11239",
        _OBJECTIVES + "generative.diffusion",
    ),
    (
        "flow",
        "|f((1 - t) x0 + t eps, t) - (eps - x0)|^2",
        "Lipman et al. 2023, arXiv:2210.02747",
        _OBJECTIVES + "generative.flow",
    ),
    (
        "score",
        "|s f(x0 + s eps, t) + eps|^2, s from low to high",
        "Song & Ermon 2019, arXiv:1907.05600",
        _OBJECTIVES + "generative.score",
    ),
    (
        "gan",
        "softplus(-D(x)) + softplus(D(y)), relu(1 - D(x)) + relu(1 + D(y)), or D(y) - D(x) with |grad D| <= 1; y = G(z)",
        "Goodfellow et al. 2014, arXiv:1406.2661; Arjovsky et al. 2017, arXiv:1701.07875",
        _OBJECTIVES + "generative.adversarial",
    ),
    (
        "pix2pix",
        "softplus(-D(c, y)) + l1 |x - y|, y = G(c), c a part of x; D as in gan, of patches",
        "Isola et al. 2017, arXiv:1611.07004",
        _OBJECTIVES + "generative.adversarial",
    ),
]

_ROWS = (
    *_LANGUAGE_MODEL,
    *_DISTILLATION,
    *_PREFERENCES,
    *_POLICY_GRADIENTS,
    *_AGENTS,
    *_ESTIMATORS,
    *_GENERATIVE,
)
CATALOG: Mapping[str, ObjectiveInfo] = MappingProxyType({row[0]: ObjectiveInfo(*row) for row in _ROWS})
