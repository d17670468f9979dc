//! cubecl's own tests on the collective runtime.
//! One of them aborts its process on Mesa's lavapipe, so run them with `scripts/suites`.

// The macros check features of the crate that they were written for.
#![allow(unexpected_cfgs)]

mod tests {
    use half::f16;

    pub type TestRuntime = bonfire::CollectiveRuntime<cubecl::wgpu::WgpuRuntime>;

    // The types that cubecl-wgpu tests with WGSL.
    cubecl_core::testgen_all!(f32: [f16, f32], i32: [i32, i64], u32: [u32, u64]);
    cubecl_std::testgen!();
    cubecl_std::testgen_tensor_identity!([flex32, f32, u32]);
    cubecl_std::testgen_quantized_view!(f32);
}
