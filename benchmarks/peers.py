"""The cost of synchronization in other frameworks: a training step against the same net with their own unsynchronized
layer, on 2 CPU devices. Needs the extra: pip install '.[peers]'.

    OMP_NUM_THREADS=1 python benchmarks/peers.py flax      # or keras; flax has --net resnet50, too

The nets are step_time.py's: the chain of 8 × (conv 3×3 with 64 channels, norm, relu), 8×64×56×56 on each device,
and ResNet-50 with 4×3×128×128.
"""

import argparse
import os
import statistics
import time

DEPTH, CHANNELS, SIDE, BATCH, DEVICES = 8, 64, 56, 8, 2
KINDS = ("alone", "synchronized")


def flax_step(synchronized: bool, resnet50: bool):
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    def norm(x):
        return nn.BatchNorm(use_running_average=False, axis_name="devices" if synchronized else None)(x)

    class Chain(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(DEPTH):
                x = nn.relu(norm(nn.Conv(CHANNELS, (3, 3))(x)))
            return nn.Conv(16, (1, 1))(x)

    class ResNet50(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm(nn.Conv(64, (7, 7), (2, 2), use_bias=False)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for stage, blocks in enumerate((3, 4, 6, 3)):
                for block in range(blocks):
                    width, stride = 64 << stage, 2 if stage and not block else 1
                    y = nn.relu(norm(nn.Conv(width, (1, 1), use_bias=False)(x)))
                    y = nn.relu(norm(nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(y)))
                    y = norm(nn.Conv(4 * width, (1, 1), use_bias=False)(y))
                    if not block:
                        x = norm(nn.Conv(4 * width, (1, 1), (stride, stride), use_bias=False)(x))
                    x = nn.relu(x + y)
            return nn.Dense(100)(x.mean(axis=(1, 2)))

    if resnet50:
        net, x = ResNet50(), jnp.ones((DEVICES, 4, 128, 128, 3))
    else:
        net, x = Chain(), jnp.ones((DEVICES, BATCH, SIDE, SIDE, CHANNELS))
    variables = jax.pmap(lambda x: net.init(jax.random.PRNGKey(0), x), axis_name="devices")(x)

    def loss(parameters, statistics_, x):
        y, changed = net.apply({"params": parameters, "batch_stats": statistics_}, x, mutable=["batch_stats"])
        return y.sum(), changed

    train = jax.pmap(jax.value_and_grad(loss, has_aux=True), axis_name="devices")
    return lambda: jax.block_until_ready(train(variables["params"], variables["batch_stats"], x))


def keras_step(synchronized: bool):
    import tensorflow as tf

    if not tf.config.list_logical_devices("CPU")[1:]:
        raise RuntimeError("needs two logical CPU devices")
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    with strategy.scope():
        layers = [tf.keras.layers.Input((SIDE, SIDE, CHANNELS))]
        for _ in range(DEPTH):
            layers += [
                tf.keras.layers.Conv2D(CHANNELS, 3, padding="same"),
                tf.keras.layers.BatchNormalization(synchronized=synchronized),
                tf.keras.layers.ReLU(),
            ]
        net = tf.keras.Sequential([*layers, tf.keras.layers.Conv2D(16, 1)])
    x = tf.ones((BATCH, SIDE, SIDE, CHANNELS))

    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x, training=True))
        return [tf.reduce_sum(item) for item in tape.gradient(loss, net.trainable_variables)]

    @tf.function
    def train():
        return strategy.run(replica)

    def step():
        for item in tf.nest.flatten(strategy.experimental_local_results(train())):
            item.numpy()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["flax", "keras"])
    parser.add_argument("--net", choices=["chain", "resnet50"], default="chain")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.framework == "keras" and options.net != "chain":
        parser.error("keras has the chain only")
    if options.framework == "flax":
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_multi_thread_eigen=false "
            f"intra_op_parallelism_threads=1"
        )
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(DEVICES)
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    if options.framework == "flax":
        steps = {name: flax_step(name == "synchronized", options.net == "resnet50") for name in KINDS}
    else:
        steps = {name: keras_step(name == "synchronized") for name in KINDS}
    for step in steps.values():
        for _ in range(3):
            step()
    seconds = {name: [] for name in steps}
    for _ in range(options.steps):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    ratio = statistics.median(a / b for a, b in zip(seconds["alone"], seconds["synchronized"]))
    shown = ", ".join(f"{name} {1e3 * statistics.median(values):.0f} ms" for name, values in seconds.items())
    print(f"{options.framework}: {shown}; throughput against its own unsynchronized layer {ratio:.2f}")


if __name__ == "__main__":
    main()
