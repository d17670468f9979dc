//! A backward pass from a tensor whose graph has been merged twice.

use burn::tensor::{Device, Tensor};

#[test]
fn the_origin_of_a_graph_that_was_merged_twice() {
    let device = Device::flex().autodiff();
    let leaves = [(); 3].map(|()| Tensor::<1>::ones([1], &device).require_grad());

    // An earlier pass consumes the leaves, so each of the next products begins a graph.
    let [x, y, z] = leaves.clone().map(|leaf| leaf * 2.0);
    let _ = (x + y + z).backward();

    let [x, y, z] = leaves.clone().map(|leaf| leaf * 2.0);
    // The graph of `z` goes into that of `y`, and then that of `y` into that of `x`.
    let _unused = x + (y + z.clone());
    let gradients = (z.clone() * z).backward();
    let gradient = leaves[2].grad(&gradients).expect("a gradient of the leaf");
    assert_eq!(gradient.into_scalar::<f32>(), 8.0);
}
